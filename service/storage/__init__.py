"""Where bytes lie: blobs by digest, folders by manifest, uploads on their way in, checkpoints beside them."""
