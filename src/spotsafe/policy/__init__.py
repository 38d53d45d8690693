"""Pure decisions: when to save, what to keep, what still fits. No I/O, no clock, no torch."""
