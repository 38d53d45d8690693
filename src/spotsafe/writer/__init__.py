"""Carries staged saves to storage. Imports no torch."""
