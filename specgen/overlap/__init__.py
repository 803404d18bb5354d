"""Is this draft worth it, from text alone?"""
