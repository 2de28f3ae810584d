"""What makes up a run: prepared, started, connected, recorded and ended. Commands stand on it."""
