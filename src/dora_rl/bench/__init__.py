"""Measurements that users can repeat."""
