"""What makes, names and measures models. Engines, trainer and audit need it alike; it knows none of them."""
