"""State of torch objects as named tensors and typed values."""
