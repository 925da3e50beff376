package runtime

import "io"

// The rest of go-runc's IO; go-runc itself only calls Set.

func (p *pipes) Close() error { p.closeTheirs(); p.closeOurs(); return nil }

func (p *pipes) Stdin() io.WriteCloser { return p.in.w }

func (p *pipes) Stdout() io.ReadCloser { return p.out.r }

func (p *pipes) Stderr() io.ReadCloser { return p.err.r }
