"""The processes of a run that run distributed's code: scheduler, nanny, worker; their devices and plugins."""
