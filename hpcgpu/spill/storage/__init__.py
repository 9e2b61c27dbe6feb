"""What lies on disk, and host memory that is used again: files, folders, pools, pickles."""
