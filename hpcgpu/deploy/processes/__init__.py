"""The processes of a run that run distributed's code: scheduler, nanny and worker, and their parts."""
