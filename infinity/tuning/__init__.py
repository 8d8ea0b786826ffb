"""Tuning: the library behind `infinity tune`: I/O settings of disks, the speed of memory and of the link."""
