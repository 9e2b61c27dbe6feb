"""The facts of workers: measured in them, recorded by the scheduler, asked for by people, shown on a page."""
