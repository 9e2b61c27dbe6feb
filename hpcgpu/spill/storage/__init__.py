"""The disk tier, and host memory that is used again: files, folders, mounts, pools."""
