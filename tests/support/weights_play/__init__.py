"""Random schedules over updates, pauses, sleeps and wakes: a model of what must hold, and who plays it."""
