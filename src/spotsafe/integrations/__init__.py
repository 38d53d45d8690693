"""Adapters to other libraries, one file for each."""
