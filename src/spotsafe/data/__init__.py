"""The order of samples, resumable at any position."""
