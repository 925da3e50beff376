package evidence

import (
	"bytes"
	_ "embed"
	"strings"
	"text/template"

	"tagout/internal/authority"
)

//go:embed readme.txt.tmpl
var readmeText string

var readmePage = template.Must(template.New("readme").Parse(readmeText))

func (b *bundle) readme(public string) []byte {
	var out bytes.Buffer
	first := ""
	if len(b.sheet.Logs) > 0 {
		first = b.sheet.Logs[0].Daemon
	}
	err := readmePage.Execute(&out, map[string]any{"Sheet": &b.sheet, "Key": authority.KeyID(public), "First": first, "Underline": strings.Repeat("=", len("Evidence: ")+len(b.sheet.Kind)+1+len(b.sheet.Who))})
	if err != nil {
		panic(err) // the template is ours, and a buffer takes everything
	}
	return out.Bytes()
}
