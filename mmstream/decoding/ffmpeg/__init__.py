"""Audio and video files of strangers, opened by FFmpeg (PyAV) with limits."""
