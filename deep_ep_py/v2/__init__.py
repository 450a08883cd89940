"""DeepEP V2's interface, `ElasticBuffer`, over the operations of normal mode."""
