"""The system: facts about this machine, settings of its disks, and the user's cache of both."""
