package wire

import "time"

// File is one entry of a directory in a kid.
type File struct {
	Name     string    `json:"name"`
	Kind     FileKind  `json:"kind"`
	Size     int64     `json:"size"`
	Mode     string    `json:"mode"` // permission bits, octal
	Modified time.Time `json:"modified"`
}

// FileKind says what an entry is. A link is never followed.
type FileKind string

// Kinds. Only files and directories are carried in and out.
const (
	KindFile      FileKind = "file"
	KindDirectory FileKind = "directory"
	KindLink      FileKind = "link"
	KindOther     FileKind = "other" // a FIFO, socket or device
)

// Carried is what was put into a kid.
type Carried struct {
	Bytes int64 `json:"bytes"`
	Files int   `json:"files"` // and directories
}

// ToolCall is an AI agent's call of a tool, for the record.
type ToolCall struct {
	Tool      string `json:"tool"`
	Kid       string `json:"kid,omitempty" maxLength:"64"`                        // whom it names
	Arguments string `json:"arguments"`                                           // JSON, long texts cut
	SHA256    string `json:"arguments_sha256,omitempty" pattern:"^[0-9a-f]{64}$"` // of all of them, as they came
	Bytes     int    `json:"arguments_bytes,omitempty" minimum:"0"`               // that they had
}
