"""What a checkpoint is on storage, and the protocol by which it comes to exist."""
