"""The system: this machine, its disks' settings, and probes of both."""
