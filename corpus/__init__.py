"""Corpora: documents become tokens, shards and a manifest. Nothing here needs torch.

documents    the files of a source, cut into units of work; the documents of a unit
tokenizer    a tokenizer that is trained, or one that is given
prepare      the tokens of the documents in several processes, the shards, the manifest
manifest     the contract between preparation and training
config       the table [data]
location     folders and object stores

"""
