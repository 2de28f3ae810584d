"""What happened: the journal and what is computed from it."""
