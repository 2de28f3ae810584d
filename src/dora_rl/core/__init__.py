"""Pure scheduling: events in, commands out. No clock, no I/O, no chance that does not come from the state."""
