"""Run programs, read the machine, change processes: floor 4, and the only room that may."""
