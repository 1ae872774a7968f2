//! Part of uroce.
