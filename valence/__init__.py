"""The `valence` command: starts the services under a supervisor, and looks after them while they run."""
