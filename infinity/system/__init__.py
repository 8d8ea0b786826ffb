"""System: facts about this machine, I/O settings of its disks, and files in the user's cache."""
