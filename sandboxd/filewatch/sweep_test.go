package filewatch

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
)

// TestHalfWrittenFilesOfAPredecessorGo when the next sandboxd says who is watched.
func TestHalfWrittenFilesOfAPredecessorGo(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file, half := filepath.Join(dir, "watched.json"), filepath.Join(dir, ".new-watched.json-123")
	if err := os.WriteFile(half, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	w := New(Config{File: file, GID: os.Getgid(), Audit: &records{}, Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // it says it once, and ends
	w.Run(ctx)
	if _, err := os.Stat(file); err != nil {
		t.Errorf("nothing was said: %v", err)
	}
	if _, err := os.Stat(half); !os.IsNotExist(err) {
		t.Errorf("what was half-written is still there: %v", err)
	}
}
