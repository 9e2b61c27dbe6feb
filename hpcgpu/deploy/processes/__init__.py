"""The processes of a run that are distributed's: scheduler, nanny and worker, and their parts."""
