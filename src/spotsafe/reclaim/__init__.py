"""How a reclaim is noticed."""
