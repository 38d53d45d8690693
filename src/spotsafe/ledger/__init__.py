"""What happened in each attempt, kept beside the checkpoints."""
