"""Watches which bytes of a cache change, and follows bytes from one cache to another."""
