"""What `kvdiag run` can do after its verdict: try a fix, and name the lines of code behind a leak."""
