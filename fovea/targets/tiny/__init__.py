"""The embedded default target: a small Qwen2.5-VL that the project trains itself on pictures it draws itself."""
