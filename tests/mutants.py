"""Runs the tests against small wrong versions of the scripts: each must fail a test.

  python tests/mutants.py                 all of them, two at a time
  python tests/mutants.py val.py          those of one script
  python tests/mutants.py --jobs 1 3 17   those with these numbers

A row of MUTANTS is a file, a text that occurs there exactly once, and what replaces it. The tests run in a copy of the
project, those of the file first, until one fails. Prints a line for each mutant; the exit status is 1 if any survives.
"""

import argparse
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# fmt: off
MUTANTS = [
  # The loss, the gradients and the update.
  ('train.py', 'compute_gradients(weight * tower.losses,', 'compute_gradients(weight * tower.cross_entropy,'),
  ('train.py', 'compute_gradients(weight * tower.losses,', 'compute_gradients(weight * (tower.losses + tower.weight_decay),'),
  ('train.py', 'compute_gradients(weight * tower.losses,', 'compute_gradients(weight * (towers + [tower])[0].losses,'),
  ('train.py', 'MomentumOptimizer(rate, momentum)', 'MomentumOptimizer(peak, momentum)'),
  ('train.py', 'MomentumOptimizer(rate, momentum)', 'MomentumOptimizer(rate, 0.0)'),
  ('train.py', 'tf.add_n(gradients) / len(gradients)', 'tf.add_n(gradients)'),
  ('train.py', 'warmup = min(WARMUP_EPOCHS, epochs / 2)', 'warmup = max(WARMUP_EPOCHS, epochs / 2)'),
  ('train.py', '0.5 + 0.5 * tf.cos', '0.5 - 0.5 * tf.cos'),
  ('train.py', 'tf.add_n(values) / len(towers)', 'tf.add_n(values)'),
  ('train.py', 'keep_prob, data.num_classes, True)', 'keep_prob, data.num_classes, False)'),
  # When it ends, what it saves and says.
  ('train.py', 'None if FLAGS.seed is None else FLAGS.seed + workers.rank', 'None'),
  ('train.py', 'self._step >= self._saved + self._save_steps', 'self._step > self._saved + self._save_steps'),
  ('train.py', 'if not session.run(self._all_finite):', 'if session.run(self._all_finite) is None:'),
  ('train.py', 'if not np.isfinite(loss):', 'if loss is None:'),
  ('network.py', '      self._remove_unfinished()\n', ''),
  ('network.py', '    self._saver.recover_last_checkpoints(earlier[-keep_checkpoints:])\n', ''),
  ('network.py', 'tf.train.remove_checkpoint(self._surplus.pop())', 'self._surplus.pop()'),
  ('data_input.py', 'status=tf.SessionLog.START', 'status=tf.SessionLog.STOP'),
  ('train.py', 'if (num_gpus or 0) > visible:', 'if (num_gpus or 0) > visible + 1:'),
  ('train.py', 'done=self._step >= self._last_step', 'done=False'),
  ('train.py', 'self._first_step + 1, self._last_step)', 'self._first_step, self._last_step)'),
  ('train.py', "if values.results['signalled'] or values", 'if values'),
  # Several machines.
  ('train.py', 'weight = own_batch / (global_batch or own_batch)', 'weight = 0.5 if global_batch else 1.0'),
  ('train.py', 'variable.value() if self.rank == 0 else', 'variable.value() if self.rank == 1 else'),
  ('train.py', 'filter(None, known + hosts)', 'filter(None, known)'),
  ('train.py', 'FLAGS.momentum, FLAGS.keep_prob, global', '0.9, FLAGS.keep_prob, global'),
  ('train.py', 'FLAGS.momentum, FLAGS.keep_prob, global', 'FLAGS.momentum, 0.8, global'),
  ('train.py', "warn('lost %s;", "warn('lost %.0s;"),
  ('train.py', 'int(all_images[0])', 'int(images)'),
  # The network.
  ('network.py', 'WEIGHT_DECAY = 0.0004', 'WEIGHT_DECAY = 0.0005'),
  ('network.py', 'decayed=i == 1)', 'decayed=i == 2)'),
  ('network.py', 'stride = 2 if (block, i) == (1, 2)', 'stride = 2 if (block, i) == (1, 1)'),
  ('network.py', 'keep_prob if is_training else 1', 'keep_prob'),
  ('network.py', '[1, 3, 3, 1], [1, 2, 2, 1]', '[1, 2, 2, 1], [1, 2, 2, 1]'),
  ('network.py', 'rate=1 - self.keep_prob', 'rate=self.keep_prob * 0.9'),
  ('network.py', 'inside**-0.5', 'inside**0.5'),
  ('network.py', 'x = tf.nn.relu(self.dense(x, width', 'x = tf.identity(self.dense(x, width'),
  ('network.py', 'return self.cross_entropy + self.weight_decay', 'return self.cross_entropy'),
  ('network.py', 'key=checkpoint_step)', 'key=str)'),
  ('network.py', "taking %s', path, newest, whole[-1])\n      return whole[-1]", "taking %s', path, newest, whole[0])\n      return whole[0]"),
  ('network.py', 'if shapes.get(name) != variable.shape.as_list():', 'if name not in shapes:'),
  ('network.py', '.isfinite(values[names.index(name)]).all()', '.isfinite(values[names.index(name)]).any()'),
  # Pixels, queues and files.
  ('data_input.py', "'bird', 'cat', 'deer'", "'bird', 'deer', 'cat'"),
  ('data_input.py', 'tf.unstack(planes, axis=1)', 'tf.unstack(planes, axis=1)[::-1]'),
  ('data_input.py', 'edge = (IMAGE_SIZE - CROP_SIZE) // 2', 'edge = (IMAGE_SIZE - CROP_SIZE) // 4'),
  ('data_input.py', 'random_brightness(images, 63), 0.2, 1.8)', 'random_brightness(images, 63), 0.5, 1.5)'),
  ('data_input.py', 'corners = IMAGE_SIZE - CROP_SIZE + 1', 'corners = IMAGE_SIZE - CROP_SIZE'),
  ('data_input.py', '_per_image(images, 0, 2, tf.int32)', '_per_image(images, 0, 1, tf.int32)'),
  ('data_input.py', 'tf.reduce_mean(images, [1, 2], keepdims=True)', 'tf.reduce_mean(images, [1, 2, 3], keepdims=True)'),
  ('data_input.py', 'tf.maximum(variance, 1.0 / (CROP_SIZE', 'tf.maximum(variance, 1e-12 / (CROP_SIZE'),
  ('data_input.py', 'shuffle=num_epochs is None', 'shuffle=False'),
  ('data_input.py', 'min_after_dequeue=20000', 'min_after_dequeue=2000'),
  ('data_input.py', 'np.flatnonzero(labels >= num_classes)', 'np.flatnonzero(labels > num_classes)'),
  ('data_input.py', 'if size == 0 or size % RECORD_BYTES:', 'if size % RECORD_BYTES:'),
  ('data_input.py', '      if _md5(partial) != DATA_MD5:\n', '      if not _md5(partial):\n'),
  ('data_input.py', 'or len(results[0]) != count:', 'or len(results[0]) > count:'),
  ('data_input.py', '  parts[1::2] = map(int, parts[1::2])\n', ''),
  ('data_input.py', '    _unfinished.discard(partial)\n    _remove(partial)\n', '    _unfinished.discard(partial)\n'),
  ('data_input.py', '  for path in _unfinished:\n    _remove(path)\n', ''),
  ('data_input.py', '    sys.stdout.flush()  # a full disk', '    # a full disk'),
  # Validation.
  ('val.py', 'labels * num_classes + logits.argmax(1)', 'logits.argmax(1) * num_classes + labels'),
  ('val.py', 'ascending=[False, True]', 'ascending=[True, True]'),
  ('val.py', "network.checkpoint_step(result['checkpoint'])", '0'),
  ('val.py', '-confidence[wrong]', 'confidence[wrong]'),
  ('val.py', 'network.TRAINING_DONE)) else 0', 'network.TRAINING_DONE)) else polls_done'),
  ('val.py', '    seen.update(new)\n', ''),
  ('val.py', '.clip(lower=1)', ''),
  # TFRecords.
  ('toTFRecords.py', "('.png', '.jpg', '.jpeg', '.gif')", "('.png', '.jpg', '.gif')"),
  ('toTFRecords.py', "endswith(SUFFIXES) and not name.startswith('.')", 'endswith(SUFFIXES)'),
  ('toTFRecords.py', 'images.sort(key=natural_order)', 'images.sort()'),
  ('toTFRecords.py', 'if twin != name:', 'if twin is None:'),
  ('toTFRecords.py', 'resized + was_resized', 'resized + 1'),
  ('toTFRecords.py', 'if unreadable and not skip_unreadable:', 'if len(unreadable) > 9 and not skip_unreadable:'),
  ('test_tfrecords.py', 'table.iloc[order].to_csv', 'table.to_csv'),
  ('test_tfrecords.py', 'np.array(CLASSES)[logits.argmax(1)]', 'np.array(CLASSES)[logits.argmin(1)]'),
  ('test_tfrecords.py', 'exponents / exponents.sum(1, keepdims=True)', 'exponents / exponents.sum(0, keepdims=True)'),
  ('test_tfrecords.py', 'if len(names) != count:', 'if len(names) > count:'),
  ('test_tfrecords.py', 'tensors = preprocess(images), features', 'tensors = preprocess(images[:, ::-1]), features'),
  ('test_tfrecords.py', 'or len(raw[0]) != IMAGE_BYTES', 'or len(raw[0]) > IMAGE_BYTES'),
]
# fmt: on


def mutated(name, old, new):
  """The text of a script with `old` replaced; ends the program where that does not occur exactly once."""
  with open(os.path.join(HOME, name), encoding='utf-8') as f:
    text = f.read()
  if text.count(old) != 1:
    sys.exit('error: %s holds %d times, not once: %r' % (name, text.count(old), old))
  return text.replace(old, new)


def test_files(name):
  """All test files, that of a script first."""
  folder = os.path.join(HOME, 'tests')
  files = sorted(file for file in os.listdir(folder) if re.match(r'test_.*\.py$', file))
  own = 'test_' + name
  return [os.path.join('tests', file) for file in [own] + [file for file in files if file != own]]


def failed_test(name, text):
  """Runs the tests where the script `name` has the text `text`. Returns the first test that fails, or None."""
  with tempfile.TemporaryDirectory() as folder:
    copy = os.path.join(folder, 'project')
    shutil.copytree(HOME, copy, ignore=shutil.ignore_patterns('.git', '__pycache__', 'data', 'checkpoints', '*env*'))
    with open(os.path.join(copy, name), 'w', encoding='utf-8') as f:
      f.write(text)
    arguments = ['-x', '-p', 'no:cacheprovider', '--basetemp', os.path.join(folder, 'tmp')]
    done = subprocess.run([sys.executable, '-m', 'pytest'] + arguments + test_files(name), cwd=copy, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
  output = done.stdout.decode(errors='replace')
  if done.returncode == 0:
    return None
  found = re.search(r'^(?:FAILED|ERROR|HANGS) (.*?)(?: - |$)', output, re.M)
  return found.group(1) if found else output[-300:]


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('which', nargs='*', help='numbers of mutants, or names of scripts (default: all)')
  parser.add_argument('--jobs', type=int, default=2, help='mutants at a time')
  options = parser.parse_args()
  texts = [mutated(*mutant) for mutant in MUTANTS]
  numbers = [i for i, mutant in enumerate(MUTANTS) if not options.which or {str(i), mutant[0]} & set(options.which)]

  def run(i):
    start = time.time()
    return i, failed_test(MUTANTS[i][0], texts[i]), time.time() - start

  survivors = []
  with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
    for i, killer, seconds in pool.map(run, numbers):
      name, old, new = MUTANTS[i]
      print('%2d  %-17s %4.0f s  %s' % (i, name, seconds, killer or 'SURVIVED: %r for %r' % (new, old)), flush=True)
      if not killer:
        survivors.append(i)
  print('%d of %d killed' % (len(numbers) - len(survivors), len(numbers)))
  sys.exit(bool(survivors))


if __name__ == '__main__':
  main()
