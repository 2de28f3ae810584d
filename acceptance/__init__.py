"""Shows on real runs what each step of the project has to show. Not part of the product: the wheel has none of it."""
