"""The scheduler: waiting requests, one planner, one loop. No torch, no sockets, no clock of its own."""
