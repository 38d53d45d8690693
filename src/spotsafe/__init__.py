"""Training resilience for PyTorch on machines that can vanish at any second."""
