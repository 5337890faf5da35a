"""The object tier: S3, Azure Blob, Google Cloud Storage. See `tier`."""
