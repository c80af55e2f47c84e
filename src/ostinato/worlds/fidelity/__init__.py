"""Can a model tell a simulated world from production?"""
