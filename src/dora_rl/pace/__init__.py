"""Paced emulation: everything lasts as long as one law says, whatever this machine would need for it."""
