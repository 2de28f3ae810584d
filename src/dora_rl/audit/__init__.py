"""The judge: recounts C1, C2 and C3 from a run's folder alone.

It shares no code with what it judges: it reads the journal with a reader of its own and asks neither policy nor
orchestrator. `judge.audit_run` is the way in.
"""
