"""What `holdfast bench` measures, one file a subject, in turns with the plainest code."""
