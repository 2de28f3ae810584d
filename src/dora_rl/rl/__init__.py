"""What a prompt is and what an answer is worth; usable from a notebook."""
