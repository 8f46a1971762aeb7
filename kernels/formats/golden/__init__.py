"""Bytes that DeepGEMM's quantisers wrote and values that FlashMLA read, recorded on a GPU."""
