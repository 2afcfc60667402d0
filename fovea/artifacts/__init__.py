"""What a target taught, kept on disk: webdataset shards, a manifest and the fingerprint of all that made them."""
