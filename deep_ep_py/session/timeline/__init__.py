"""The recording of a rank's timeline, in the format of Chrome and Perfetto."""
