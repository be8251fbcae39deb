"""The object tier: a bucket of an object store, S3, Azure Blob or Google Cloud Storage."""
