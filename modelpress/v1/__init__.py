"""The generated wire types of `protos/modelpress/v1`: made by `make protos`, never edited."""
