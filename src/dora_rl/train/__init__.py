"""The trainer: model, batch, loss, advantage. It learns what it is given and schedules nothing."""
