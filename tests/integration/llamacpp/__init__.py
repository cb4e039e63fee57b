"""kvdiag against llama.cpp's own server."""
