"""What fits: budgets, plans, the catalogues of GPUs and models."""
